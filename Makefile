# make demo    set everything up and run the main job          make check   style, types, structure and pure tests, under a minute
# make test    set everything up and pass all tests            make table   all tests but the zoo: the whole tables
# make system  Debian packages that some tests use             make clean   remove what make made
# make zoo     models from elsewhere, all of them: writes docs/same_training/models.md (over an hour)
# make docs    the site, into docs/_build/html                 (a warning is an error)
# make cuts    those that can be cut, in two at every place there is (hours)
# make versions    a part of the tests on the lowest and on the newest versions of what paragrad stands on, in .venv-lowest, .venv-newest

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test types sample check table zoo docs cuts versions lowest newest system clean
.DEFAULT_GOAL := test

demo: .venv/ready
	$(BIN)/paragrad compare digits

check: .venv/ready
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check --quiet src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/pytest -m "pure and not table and not story" --numprocesses 2 --dist worksteal

# types are checked beside the tests
test: .venv/ready
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check --quiet src tests benchmarks examples
	$(MAKE) --no-print-directory --jobs 2 types sample

types:
	$(BIN)/mypy

sample:
	$(BIN)/pytest -m "not table and not story" --numprocesses 2 --dist worksteal

table: .venv/ready
	$(BIN)/pytest --timeout 300

# the page is written also where rows are not as expected, and says which
zoo: .venv/zoo
	PARAGRAD_MODELS_PAGE=docs/same_training/models.md $(BIN)/pytest tests/zoo --ignore tests/zoo/test_zoo_cut_points.py --timeout 300 --numprocesses 2 --dist worksteal

cuts: .venv/zoo
	$(BIN)/pytest tests/zoo/test_zoo_cut_points.py --timeout 1800 --numprocesses 2 --dist worksteal

# what they cover: the command line, files, downloads, drawings, pages, the records and ranks of a training
COVERING := $(addprefix tests/,commands/test_cli.py datasets/test_datasets.py benchmarks/test_benchmark_pages.py \
              jobs/test_digits.py jobs/test_job_files.py planner/test_profile.py record/test_record.py)

# environments of one run: bytecode is made of what is imported, not of all of torch
versions: lowest newest

lowest:
	$(PYTHON) -m venv --clear .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --no-compile --constraint constraints-lowest.txt torch
	.venv-lowest/bin/python -m pip install --quiet --no-compile --constraint constraints-lowest.txt --editable '.[dev]'
	.venv-lowest/bin/pytest $(COVERING) -m "not table and not story"

# from a source distribution, which has all that its tests need; torch is the pinned one
newest:
	$(PYTHON) -m venv --clear .venv-newest
	grep '^torch==' constraints.txt >.venv-newest/torch.txt
	.venv-newest/bin/python -m pip install --quiet --no-compile --requirement .venv-newest/torch.txt build
	.venv-newest/bin/python -m build --sdist --outdir .venv-newest >/dev/null
	mkdir .venv-newest/sdist
	tar -xzf .venv-newest/paragrad-*.tar.gz --directory .venv-newest/sdist --strip-components 1
	.venv-newest/bin/python -m pip install --quiet --no-compile --constraint .venv-newest/torch.txt '.venv-newest/sdist[dev]'
	cd .venv-newest/sdist && ../bin/pytest $(COVERING) -m "not table and not story"

# mpirun for the tests of joining a world, a browser for those of the page, ip and tc for several hosts; tests that miss them
# skip and say so
system:
	@if which mpirun chromium chromedriver ip tc >/dev/null; then echo "the Debian packages are there"; else \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends openmpi-bin chromium chromium-driver iproute2 >/dev/null; fi

# torch alone first: with it in place nothing else asks for another build of it
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || (echo "paragrad needs Python 3.11 or later; make PYTHON=/path/to/python3" >&2; exit 1)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.venv/zoo: .venv/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,zoo]'
	touch $@

.venv/docs: .venv/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	touch $@

docs: .venv/docs
	rm -rf docs/_build
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going docs docs/_build/html

clean:
	rm -rf docs/_build .venv .venv-lowest .venv-newest .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
