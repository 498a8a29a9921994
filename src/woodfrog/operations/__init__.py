"""Operations as lists of phases, one a file: checkpoint, restore, suspend, resume."""
