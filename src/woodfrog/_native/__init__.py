"""What is compiled: extension modules `transfer` and `wire`, and the programs that `paths` names."""
