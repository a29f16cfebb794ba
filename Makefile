# The two commands of README.md. All they do is make .venv (tools/setup_env.py) and call what is in it.
PYTHON ?= python3

.PHONY: demo test env clean

demo: env
	.venv/bin/sglang-sm120 demo

test: env
	.venv/bin/python -m pytest

env:
	@$(PYTHON) tools/setup_env.py

clean:
	rm -rf .venv build *.egg-info
