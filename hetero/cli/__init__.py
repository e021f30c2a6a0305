"""The `hetero` command and the training job that it runs."""
