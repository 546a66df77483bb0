"""The rewriting of bodies that SGLang would reject or misread, a file for each protocol."""
