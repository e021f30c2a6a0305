"""What `hetero doctor` looks at: facts of this machine, checks that judge them, and the report."""
