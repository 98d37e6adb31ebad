"""How long a kernel would take on an MI300X: a model over executed traces, not measured."""
