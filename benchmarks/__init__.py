"""What the speed claims in docs/ rest on; each module is a program with `--help`."""
