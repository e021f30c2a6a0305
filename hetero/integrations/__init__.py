"""hetero in the training loops of other libraries: Hugging Face's Trainer, Accelerate, Lightning.

Each module here needs the library that it is named after, and imports it. What they share: the
library's own loop stays as it is; saving and resuming go through hetero.save() and hetero.load(),
piece by piece, where the library would hold all state in memory at once; and the engine does what a
wrapper for several ranks (DistributedDataParallel, FSDP) would do otherwise.
"""
