"""The other processes: groups, messages that time out and name the culprit, the shard server."""
