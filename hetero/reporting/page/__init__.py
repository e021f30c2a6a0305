"""The page of a run: charts made by matplotlib, inside one HTML file that needs nothing else."""
