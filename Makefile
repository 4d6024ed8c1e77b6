.PHONY: install test test-fast lint format check

install:  ## Install the package with what tests and linters need
	pip install -e '.[dev]'

test:  ## Run the tests of the README
	pytest

test-fast:  ## Run the tests without whole runs
	pytest -m 'not slow and not exhaustive'

lint:  ## Check lint, format and types
	ruff check .
	ruff format --check .
	mypy

format:  ## Mend lint and format in place
	ruff check --fix .
	ruff format .

check:  ## Run what main must pass
	.ci/run
