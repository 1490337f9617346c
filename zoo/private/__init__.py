"""Private names of other packages: a module a package, and nowhere else. tests/test_private_names.py watches them."""
