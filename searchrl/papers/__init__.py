# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Parts that a single paper needs, one package per paper. Configs name them."""
