"""The time of a kernel on an MI300X: a model over executed traces, not measured."""
