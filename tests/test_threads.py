"""How threads wait is settled before PyTorch is imported, unless the user has."""

import os
import subprocess
import sys

import pytest

CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "4000"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": None}),
        ({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": None, "GOMP_SPINCOUNT": "7"}),
    ],
)
def test_threads_spin_for_a_moment_unless_the_user_chose(chosen, expected):
    look = f"print({{name: os.environ.get(name) for name in {CHOICES}}})"
    code = f"import os, sys; import zoo; {look}"
    environment = {name: value for name, value in os.environ.items() if name not in CHOICES} | chosen
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout.strip() == str(expected), done.stderr
