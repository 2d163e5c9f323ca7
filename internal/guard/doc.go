// Package guard holds the tests that keep the architecture, and the promises about the
// repository itself: what packages may import, what their documentation holds, and how
// long an example is. Its parts read test results, documents and figures, and compare the API.
package guard
