# Short names for the workshop's commands. Each target first prepares the environment in $(VENV)
# with setup/environment_setup.sh, which takes a moment when it is ready.
#
#   make compare ARGS="--config medium"     options for the tool behind the target
#   make setup BUILD=rocm                   PyTorch's build: auto, cpu, cuda, rocm
#   make setup PYTHON=python3.12 VENV=/scratch/me/venv
#   make setup ARGS=--recreate              delete the environment that is there, and make it anew
#   make notebook NOTEBOOK=labs/data_pipeline/where_does_the_step_wait.ipynb

VENV ?= .venv
BUILD ?= auto
PYTHON ?=
ARGS ?=

RUN = "$(VENV)/bin/python"
PREPARE = bash setup/environment_setup.sh --venv "$(VENV)" --build $(BUILD) \
	$(if $(PYTHON),--python "$(PYTHON)")
NOTEBOOK = exercises/notebooks/workshop_tour.ipynb
MY_NOTEBOOK = results/tour/$(notdir $(NOTEBOOK))

.DEFAULT_GOAL := help
.PHONY: help setup compare profile dashboard report slides notebook test test-all lint docs clean environment \
	test-environment notebook-environment
# Two targets at once would prepare the same environment at once.
.NOTPARALLEL:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile
	@echo 'Options go into ARGS: make compare ARGS="--help"'

setup: ## prepare the Python environment (VENV, BUILD, PYTHON, ARGS=--recreate)
	@$(PREPARE) $(ARGS)

compare: environment ## time the versions against each other, after proving that they agree
	@$(RUN) analysis_tools/compare_versions.py $(ARGS)

profile: environment ## run every profiler that this machine has on every version
	@status=0; for folder in version?_*/; do \
		PYTHON=$(RUN) bash "$$folder/run_all_profilers.sh" $(ARGS) || \
			{ ended=$$?; case $$ended in 1) status=1 ;; 77) ;; *) exit $$ended ;; esac; }; \
	done; exit $$status

dashboard: environment ## show all results in the browser, those of results/reference as well
	@$(RUN) analysis_tools/performance_dashboard.py $(ARGS)

report: environment ## write a report of all results: one page that needs no network
	@$(RUN) analysis_tools/report_generator.py $(ARGS)

slides: environment ## build the four slide decks from results (ARGS="--results results": from yours)
	@$(RUN) slides/build.py $(ARGS)

# The copy is the reader's: with predictions and outputs in it, the checkout stays as it is. Jupyter
# listens on this machine alone and asks for a token; it sends root away, who is the user of most
# containers, unless asked not to.
notebook: notebook-environment ## open the tour of the workshop in JupyterLab, or another NOTEBOOK
	@mkdir -p $(dir $(MY_NOTEBOOK))
	@[ -e $(MY_NOTEBOOK) ] || cp $(NOTEBOOK) $(MY_NOTEBOOK)
	@$(RUN) -m jupyterlab --ip 127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) \
		$(ARGS) $(MY_NOTEBOOK)

PYTEST = $(RUN) -m pytest -n auto --dist loadfile --no-loadscope-reorder

test: test-environment ## run most tests (those for a GPU where there is one)
	@$(PYTEST) -m "not slow" $(ARGS)

test-all: test-environment ## run all tests
	@$(PYTEST) $(ARGS)

lint: test-environment ## check style, formatting and types
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy

docs: test-environment ## write the documentation's tables and pictures from results/reference
	@$(RUN) analysis_tools/update_docs.py $(ARGS)

clean: ## delete caches; results and the environment stay
	@find . -path "./$(VENV)" -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis

environment:
	@$(PREPARE)

test-environment:
	@$(PREPARE) --with-tests

notebook-environment:
	@$(PREPARE) --with-notebook
