"""The verbs, each as the list of its stages. No mathematics, no printing: read this file first."""
