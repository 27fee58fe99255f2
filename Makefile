# `make demo` and `make test` need Python 3.11+ and nothing else.
PYTHON ?= python3
VENV ?= .venv
PROMPT ?=
export PROMPT
export PYTHON

.PHONY: demo test check bench venv demo-model clean

venv:
	@scripts/venv.sh $(VENV) demo,dev,plot,torch mlx

demo:
	@scripts/venv.sh $(VENV) demo,torch
	@scripts/demo_model.sh $(VENV)
	@KAFILA_PROMPT="$$PROMPT" $(VENV)/bin/python -m kafila.demo.ring

demo-model: venv
	@scripts/demo_model.sh $(VENV)

# Everything that has to be green. Two workers, a file of tests in one of them: what starts real processes waits much.
WORKERS ?= 2
test: check demo-model
	@scripts/kernel_tests.sh
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST)

check: venv
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# The measured claims, each as a table.
bench: demo-model
	@for script in bench/*.py; do $(VENV)/bin/python $$script || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
