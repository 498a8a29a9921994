# The two commands a newcomer needs: `make demo` freezes and thaws a program here, `make test` runs everything.
# Each brings what it needs (see scripts/setup.sh): virtual environment, build, CRIU.

VENV   ?= .venv
PYTHON  = $(VENV)/bin/python
STAMP   = $(VENV)/.woodfrog-installed
PREFIX_CRIU = .prefix/criu/bin/criu

.PHONY: build demo test lint unit format sanitize clean
.DEFAULT_GOAL := build

build: $(STAMP)

$(STAMP): pyproject.toml CMakeLists.txt $(shell find native -type f -not -name '*.md' 2>/dev/null) scripts/setup.sh
	scripts/setup.sh $(VENV)
	touch $@

$(PREFIX_CRIU): scripts/get-criu.sh
	scripts/get-criu.sh .prefix/criu
	touch $@

demo: $(STAMP) $(PREFIX_CRIU)
	$(PYTHON) -m woodfrog demo

# Three files of tests at a time, on two processors too, since most tests wait for processes; what a file's tests share is made once.
# In the order of their names, which puts the quick ones (unit) last: else files with few long tests would be left over.
test: $(STAMP) $(PREFIX_CRIU) lint
	$(PYTHON) -m pytest -n 3 --dist loadfile --no-loadscope-reorder
	$(PYTHON) scripts/sanitize.py

unit: $(STAMP)
	$(PYTHON) -m pytest tests/unit

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PYTHON) scripts/clang_format.py --check

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(PYTHON) scripts/clang_format.py

# Interposer, keeper, transfer engine and woodfrog-enter under AddressSanitizer, UBSan and ThreadSanitizer: the end of
# `make test`, alone.
sanitize: $(STAMP)
	$(PYTHON) scripts/sanitize.py

clean:
	rm -rf build .venv .prefix
