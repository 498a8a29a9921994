"""What this machine has, and whether it suffices. Import the submodules."""
