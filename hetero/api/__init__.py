"""What user code calls after initialize(): optimizers, gathered(), clipping, state_dict."""
