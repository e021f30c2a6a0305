"""How parameters are packed into chunks and shards: sizes only, no memory."""
