"""The ranges of the fields that reach a scheduler: data in, an error out."""
