"""Code that several backends share: programs, their arguments, NVIDIA's driver."""
