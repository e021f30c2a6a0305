"""From a plain model to a running engine; parameters that are added later."""
