.PHONY: install test test-all test-newest lint format docs check

install:  ## Install the package with test and lint dependencies
	pip install -e '.[dev]'

test:  ## Run the tests of the README
	pytest

test-all:  ## Run every test
	pytest -m ''

test-newest:  ## Run the tests with each newer Python found, and the newest packages
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
