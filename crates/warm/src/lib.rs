//! Interpreters kept warm and rolled back between requests.
