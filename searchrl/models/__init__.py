# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Networks: the only folder that names Flax; elsewhere there are params and functions."""
