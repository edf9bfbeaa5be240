"""What each recipe does once its configuration is there: a module for each, which its command imports then."""
