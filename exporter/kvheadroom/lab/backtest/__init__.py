"""Backtests: alerts, forecasts and simple rules, scored on what really happened. Definitions: docs/backtest.md."""
