#!/bin/sh
# Takes out of a virtual environment what no service runs: tests, build tools, symbols.
set -eu
site=$(echo "$1"/lib/python3*/site-packages)
find "$site" -type d -name tests -prune -exec rm -r {} +
find "$site" -name conftest.py -delete
# Compiled tests. torch.testing and a few test_*.py stay: torch itself imports them.
rm -rf "$site"/torch/test "$site"/torch/bin/*Test "$site"/torch/bin/test_*
# torch asks for it, to build extensions; no service does.
for tool in setuptools pkg_resources _distutils_hack distutils-precedence.pth; do
  rm -rf "$site/$tool" "$site/$tool"-*.dist-info
done
rm "$site"/numpy/_core/_simd.*.so "$site"/numpy/_core/_*_tests.*.so
# Triton compiles with its own headers.
find "$site" -type f -not -path "$site/triton/*" -regex '.*\.\(pyi\|a\|h\|pxd\|pxi\|pyx\|proto\)' -delete
rm -r "$site"/numpy/f2py
# Messages of Google's own services; errors need google.rpc alone.
for other in api cloud gapic logging longrunning type; do rm -r "$site"/google/$other; done
# Lists of installed files, for an uninstall that never comes.
rm "$site"/*.dist-info/RECORD
# uvloop's wheel carries 12 MB of symbols.
strip --strip-unneeded "$site"/uvloop/*.so
# Nobody highlights source code here.
find "$site"/pygments/lexers -name '[!_]*.py' -delete
