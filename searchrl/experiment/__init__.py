# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Where a config ends: what a run is made of, and the loop over its steps."""
