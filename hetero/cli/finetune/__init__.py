"""The parts of `hetero finetune`: a model of Hugging Face's, trained on instructions or texts.

Vocabulary of this package:

    record        one entry of a data file: an object of a JSON list, a line of JSONL, a text
    format        what a record looks like: alpaca, sharegpt, messages or text
    conversation  the messages of a record, each with a role and a content
    example       the tokens of a record, with labels: -100 where nothing is learned
    adapter       the small matrices that LoRA trains beside a frozen model
    export        the folder that is written at the end
"""
