"""Native kernels alone, beside what memory gives and other libraries."""
