// Package once suppresses repeated log lines, in bounded memory.
package once

// Most bounds the remembered texts.
const Most = 4096
