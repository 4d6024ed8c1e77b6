.PHONY: install test test-fast test-newest lint format docs check

install:  ## Install the package with test and lint dependencies
	pip install -e '.[dev]'

test:  ## Run the tests of the README
	pytest

test-fast:  ## Run the tests without whole runs
	pytest -m 'not slow and not exhaustive'

test-newest:  ## Check part of the tests with each newer Python found, and the newest packages
	.ci/newest all

lint:  ## Check lint, format and types
	ruff check .
	ruff format --check .
	mypy

format:  ## Fix lint and format in place
	ruff check --fix .
	ruff format .

docs:  ## Build the documentation site in build/site, warnings as errors
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

check:  ## Run what main must pass
	.ci/run
