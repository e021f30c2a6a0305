"""The training job of `hetero train`: a language model on the bytes of a text.

Vocabulary of this package:

    options   what was asked for on the command line, validated
    corpus    the bytes that are trained on; a token is a byte
    rank      one of the processes that train together; each has micro-batches of its own
    step      one optimizer update: `accumulate` micro-batches of `batch_size` sequences, on each
              rank
    metrics   what one step did
    result    what the whole run did; its dictionary form is the `--json` object
    run folder   where config, metrics, summary, figure and the page about the run are written
"""
