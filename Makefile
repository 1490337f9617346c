PYTHON ?= python3
BIN := .venv/bin
RUN := runs/lm/stdlib_damcha

.PHONY: quickstart test lint format bench clean

# Train the default language model for half its usual steps, test it on held-out files, and let it write.
quickstart: .venv/installed
	$(BIN)/lightning fit --config configs/lm/stdlib_damcha.yaml --trainer.max_steps 600 --trainer.val_check_interval 150
	$(BIN)/lightning test --config configs/lm/stdlib_damcha.yaml --ckpt_path last
	@echo && echo "What it writes after 'def ':" && echo
	@$(BIN)/zoo generate --ckpt "$$(ls -t $(RUN)/version_*/checkpoints/best.ckpt | head -n 1)" \
		--prompt "def " --max-new-tokens 200 --seed 0
	@echo && echo "Curves, samples and metrics: $(BIN)/tensorboard --logdir $(RUN)"

test: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# How fast the zoo is beside what else there is: a table, benchmarks/results/cpu.json and pictures; about 15 minutes.
bench: .venv/installed
	$(BIN)/python -m pip install --quiet --editable ".[dev,bench]"
	$(BIN)/python benchmarks/run.py

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf runs .mypy_cache .ruff_cache .pytest_cache
