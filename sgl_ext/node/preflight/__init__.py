"""What is checked before an engine starts, in less time than SGLang takes to import."""
