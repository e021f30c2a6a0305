"""What autograd saves for backward, in the memory that the budgets give it, and on NVMe."""
