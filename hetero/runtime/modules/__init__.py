"""Parameters around calls of modules: gathered before, released after, again in backward."""
