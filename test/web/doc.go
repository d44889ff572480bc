// Package web tests the page with Debian's chromium, without a window, on the demo's
// network.
package web
