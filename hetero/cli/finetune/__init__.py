"""The parts of `hetero finetune`, a run of TRL's SFTTrainer: its options, its data, the trainer."""
