#!/bin/sh
# Takes out of a virtual environment what no service runs: tests, build tools, symbols.
set -eu
site=$(echo "$1"/lib/python3*/site-packages)
find "$site" -type d -name tests -prune -exec rm -r {} +
find "$site" -type f -regex '.*\.\(pyi\|a\|h\|pxd\|pxi\|pyx\|proto\)' -delete
rm -r "$site"/numpy/f2py
# uvloop's wheel carries 12 MB of symbols.
strip --strip-unneeded "$site"/uvloop/*.so
# Nobody highlights source code here.
find "$site"/pygments/lexers -name '[!_]*.py' -delete
