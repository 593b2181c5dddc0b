#!/bin/sh
# Runs the tests of the Python module in the checkout. Exit code 77: this Python lacks what they need.
# usage: run.sh PYTHON
cd "$(dirname "$0")/../.." || exit 1
"$1" -c 'import numpy, pytest' || exit 77
exec "$1" -m pytest -q -p no:cacheprovider
