"""A target as woodfrog sees it from outside: its process tree, what stands in the way of an operation, and the link to
the interposer's agent inside it. Nothing here changes a target except through the link's commands and signals."""
