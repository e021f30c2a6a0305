"""Model state in files that outlive the process: checkpoints, and folders of Hugging Face's."""
