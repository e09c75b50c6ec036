# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Parts that only one paper needs, a package each; configs name them."""
