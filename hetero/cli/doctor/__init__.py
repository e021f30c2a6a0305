"""What `hetero doctor` looks at: facts of this machine, and the findings that judge them."""
