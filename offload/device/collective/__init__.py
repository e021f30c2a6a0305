"""What devices of several ranks need to average gradients by themselves."""
