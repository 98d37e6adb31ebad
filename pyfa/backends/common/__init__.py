"""What several backends share: programs, their arguments, NVIDIA's driver."""
