"""The parts of `hetero finetune`, a run of TRL's SFTTrainer: its options, its data, the trainer.

Records are read and checked here because errors name their line; TRL has batches and the loop."""
