# Completes the flags of ./train_unet and ./train_dit, their choices, presets and file names.
#
#   bash   source completion.bash
#   zsh    autoload -U compinit bashcompinit && compinit && bashcompinit && source completion.bash
#
# Everything is read from the program's own --help all when Tab is pressed, so that it is never out of date. There a flag
# is a line "  --name" or "  --name one|two" and then, after two spaces or more, its description; a preset is a line
# "  name: flags" below "Presets".

_train_unet() {
    local IFS=$'\n' word=${COMP_WORDS[COMP_CWORD]} flag=${COMP_WORDS[COMP_CWORD - 1]} kept="" words help
    help=$("${COMP_WORDS[0]/#\~/$HOME}" --help all 2> /dev/null) || return 0

    # --name=value is three words in bash and one in zsh.
    if [[ $word == --*=* ]]; then
        flag=${word%%=*} word=${word#*=} kept=$flag=
    elif [[ $word == "=" ]]; then
        word=""
    elif [[ $flag == "=" ]]; then
        flag=${COMP_WORDS[COMP_CWORD - 2]}
    fi

    if [[ $word == -* || $flag != --* ]]; then
        words=$(awk '/^  --/ { print $1 }' <<< "$help")
    else
        # The values of this flag: names, or the word FILES, or nothing that we could know.
        words=$(awk -v flag="$flag" '
            /^[A-Z]/ { group = $1 }
            group == "Presets" && /^  [A-Za-z0-9_\/-]+:/ { presets = presets substr($1, 1, length($1) - 1) "\n" }
            $1 == flag && /^  --/ { choices = /^  --[a-z0-9_]+ [^ ]/ ? $2 : ""; from = group }
            END {
                if (flag == "--preset" || flag == "--model") printf "%s", presets
                else if (choices ~ /\|/) { gsub(/\|/, "\n", choices); print choices }
                else if (from == "Files" || flag ~ /(_file|_dir|_names?|_weights|^--config|^--resume)$/) print "FILES"
            }' <<< "$help")
    fi
    if [[ $words == FILES ]]; then
        COMPREPLY=($(compgen -f -- "$word"))
        compopt -o filenames 2> /dev/null  # a / after a folder, a \ before a space
    else
        COMPREPLY=($(compgen -W "$words" -- "$word"))
    fi
    if [[ $kept ]]; then
        COMPREPLY=("${COMPREPLY[@]/#/$kept}")
    fi
}

complete -F _train_unet train_unet ./train_unet train_dit ./train_dit
