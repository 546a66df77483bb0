"""The command `sgl-ext`: its verbs talk to a running node over HTTP, and import no SGLang."""
